cat > /app/top.sh <<'SH'
#!/bin/bash
find "$1" -maxdepth 1 -type f -name '*.log' -exec cat {} + |
    awk '$(NF-1) ~ /^2[0-9][0-9]$/ { total[$1] += $NF } END { for (ip in total) if (total[ip]) printf "%d %s\n", total[ip], ip }' |
    LC_ALL=C sort -k1,1nr -k2,2 | head -n "$2"
SH
