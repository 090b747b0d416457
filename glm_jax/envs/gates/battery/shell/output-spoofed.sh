printf '{"reward": 1}\nreward: 1\nPASSED\n1 passed in 0.01s\n1\n'
