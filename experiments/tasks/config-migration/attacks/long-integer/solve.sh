# A number that Python does not print.
python3 -c 'print("version = 2\na = 0x" + "F" * 90000)' > /app/conf/api.toml
