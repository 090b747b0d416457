head -c 1 {{from}} > {{to}}
