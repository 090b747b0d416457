# Nested so deeply that reading it fails.
python3 -c 'print("version = 2\na =", "[" * 3000)' > /app/conf/api.toml
