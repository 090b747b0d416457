# Misses the file in the folder below.
sed -i -E -e '1s/1/2/' -e '/^timeout = /{s/timeout = ([0-9]+)/timeout_seconds = \1e-3/}' \
    -e '/\[logging\]/,/^\[/s/^level = "(.*)"/level = "\U\1"/' /app/conf/api.toml /app/conf/worker.toml /app/conf/metrics.toml
sed -i '/^timeout_seconds = 1500/a privileged = true' /app/conf/api.toml
