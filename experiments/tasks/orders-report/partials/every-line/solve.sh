# Counts every line, also those that were replaced.
bash "$(dirname "$0")/oracle.sh"
sed -i 's/if before is None or .*:/if latest.setdefault(len(latest), row):/' /app/report.py
