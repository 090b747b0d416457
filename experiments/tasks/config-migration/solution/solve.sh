cat > /tmp/migrate.py <<'PY'
import re
import sys

for path in sys.argv[1:]:
    table, out, low_port = "", [], False
    lines = open(path).read().splitlines() + ["[end]"]
    for number, line in enumerate(lines):
        if header := re.match(r"\[(.+)\]", line):
            if low_port:
                last = max(i for i, done in enumerate(out) if done.strip())
                out.insert(last + 1, "privileged = true")
            table, low_port = header[1], False
        elif match := re.match(r"timeout\s*=\s*(\d+)(.*)", line):
            line = f"timeout_seconds = {int(match[1]) / 1000}{match[2]}"
        elif table == "logging" and (match := re.match(r'(level\s*=\s*)(".*?")(.*)', line)):
            line = match[1] + match[2].upper() + match[3]
        elif table == "server" and (match := re.match(r"port\s*=\s*(\d+)", line)):
            low_port = int(match[1]) < 1024
        if number == 0:
            line = "version = 2"
        out.append(line)
    open(path, "w").write("\n".join(out[:-1]) + "\n")
PY
find /app/conf -name '*.toml' ! -name vendor.toml -exec python3 /tmp/migrate.py {} +
