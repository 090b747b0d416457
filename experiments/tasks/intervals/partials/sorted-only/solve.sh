# Sorts, and misses contained and touching intervals.
sed -i 's/in intervals:/in sorted(intervals):/' /app/intervals.py
