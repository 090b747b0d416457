# Renames the key and leaves the unit.
for f in api worker metrics legacy/mail; do
    sed -i -E -e '1s/1/2/' -e 's/^timeout = /timeout_seconds = /' -e '/\[logging\]/,$s/^level = "(.*)"/level = "\U\1"/' \
        /app/conf/$f.toml
done
sed -i '/^timeout_seconds = 1500/a privileged = true' /app/conf/api.toml
sed -i '/^port = 25/a privileged = true' /app/conf/legacy/mail.toml
