# Takes the status as it is written.
cat > /app/report.py <<'PY'
"""Revenue by region and month."""

import csv
import json
import sys
from collections import defaultdict
from datetime import datetime
from decimal import Decimal


def month(text):
    layout = "%d/%m/%Y" if "/" in text else "%Y-%m-%d"
    return datetime.strptime(text.strip(), layout).strftime("%Y-%m")


def amount(text):
    text = text.strip().replace(",", "").replace("$", "")
    return -Decimal(text[1:-1]) if text.startswith("(") else Decimal(text)


orders_path, customers_path = sys.argv[1:3]
with open(customers_path, newline="") as file:
    regions = {row["customer"]: row["region"].strip().lower() for row in csv.DictReader(file)}
latest = {}
with open(orders_path, newline="") as file:
    for row in csv.DictReader(file):
        before = latest.get(row["order_id"])
        if before is None or row["updated"] >= before["updated"]:
            latest[row["order_id"]] = row
totals = defaultdict(lambda: defaultdict(Decimal))
for row in latest.values():
    if row["status"] == "paid":
        totals[regions.get(row["customer"], "unknown")][month(row["date"])] += amount(row["amount"])
print(json.dumps({region: {m: float(round(v, 2)) for m, v in months.items()} for region, months in totals.items()}))
PY
