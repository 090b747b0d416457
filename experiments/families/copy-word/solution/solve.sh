cp {{from}} {{to}}
