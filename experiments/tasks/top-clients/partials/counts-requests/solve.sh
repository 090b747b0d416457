# Ranks by the number of requests.
cat > /app/top.sh <<'SH'
find "$1" -maxdepth 1 -type f -name '*.log' -exec cat {} + | awk '$(NF-1) ~ /^2../ { print $1 }' |
    sort | uniq -c | sort -k1,1nr -k2,2 | head -n "$2" | awk '{ print $1, $2 }'
SH
