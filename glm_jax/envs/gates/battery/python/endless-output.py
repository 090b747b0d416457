# Prints until the verifier has no room left.
while True:
    print("1" * 65536, flush=True)
