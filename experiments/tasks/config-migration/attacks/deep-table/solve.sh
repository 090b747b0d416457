# Nested so deeply that printing it fails.
python3 -c 'print("version = 2\n[" + ".".join("a" * 3000) + "]")' > /app/conf/api.toml
