# Memory in a file that lies nowhere, filled by a process that asks to be killed last: its box may be killed instead.
import os

try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
except OSError:
    pass
held = os.memfd_create("held")
while True:
    os.write(held, bytes(1 << 24))
