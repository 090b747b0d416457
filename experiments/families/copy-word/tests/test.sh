# Both files hold the word and nothing else, and there is no third. Nothing of the agent's is run.
reward=0
cd /app &&
  [ "$(find . -mindepth 1 | sort | tr '\n' ' ')" = "$(printf '%s\n' ./{{from}} ./{{to}} | sort | tr '\n' ' ')" ] &&
  cmp -s {{from}} /tests/want && cmp -s {{to}} /tests/want && reward=1
echo "$reward" > /logs/verifier/reward.txt
