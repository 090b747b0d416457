# Counts fields from the left, where a request may hold blanks.
cat > /app/top.sh <<'SH'
find "$1" -maxdepth 1 -type f -name '*.log' -exec cat {} + |
    awk '$9 ~ /^2../ { total[$1] += $10 } END { for (ip in total) if (total[ip]) printf "%d %s\n", total[ip], ip }' |
    LC_ALL=C sort -k1,1nr -k2,2 | head -n "$2"
SH
