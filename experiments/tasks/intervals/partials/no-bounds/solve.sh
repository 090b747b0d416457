# Both functions handle the examples of the instruction, and an interval beyond `high` makes a gap beyond it.
bash "$(dirname "$0")/oracle.sh"
sed -i -e 's/position < min(start, high)/position < start/' -e 's/min(start, high)/start/' /app/intervals.py
