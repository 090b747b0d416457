# Writes every `level` in capitals, also that of [labels], and edits the vendor's file.
find /app/conf -name '*.toml' -exec sed -i -E -e '1s/1/2/' -e 's/^timeout = ([0-9]+)/timeout_seconds = \1e-3/' \
    -e 's/^level = "(.*)"/level = "\U\1"/' {} +
sed -i '/^timeout_seconds = 1500/a privileged = true' /app/conf/api.toml
sed -i '/^port = 25/a privileged = true' /app/conf/legacy/mail.toml
