"""Draws messy files and reads them back in whole cents, by their digits."""

import sys
from datetime import date, timedelta

sys.path.insert(0, "/grader")
import grader  # noqa: E402

STATUSES = ("paid", "Paid", " PAID", "paid ", "cancelled", "refunded", "pending", "unpaid")


def money(rng, cents):
    text = f"{abs(cents) // 100:,}.{abs(cents) % 100:02}" if rng.random() < 0.7 else f"{abs(cents) / 100:.2f}"
    text = f"${text}" if rng.random() < 0.4 else text
    text = f"({text})" if cents < 0 else text
    return f'"{text}"' if "," in text else text


def draw(rng, count):
    """orders.csv, customers.csv and the report."""
    regions = {f"c{i}": rng.choice(("north", "south", "east", "west")) for i in range(12)}
    customers = ["customer,region"]
    for customer, region in regions.items():
        customers.append(f"{customer},{rng.choice((region, region.upper(), f' {region}', f'{region.title()} '))}")
    lines = []
    for number in range(count):
        customer = rng.choice([*regions, "c77", "C1"])
        for at in rng.choices(range(8), k=rng.choice((1, 1, 1, 2, 3))):  # some at one time: the later line counts
            day = date(2023, 1, 1) + timedelta(rng.randrange(730))
            shown = day.isoformat() if rng.random() < 0.5 else day.strftime("%d/%m/%Y")
            cents = rng.choice((1, 1, 1, -1)) * rng.randint(1, 2_000_000)
            updated = f"2025-01-{1 + at // 3:02}T0{at % 3}:30:00"
            record = f"{number},{customer},{shown},{money(rng, cents)},{rng.choice(STATUSES)},{updated}"
            lines.append((number, updated, record))
    rng.shuffle(lines)
    latest = {}
    for number, updated, record in lines:
        if number not in latest or updated >= latest[number][0]:
            latest[number] = (updated, record)
    totals = {}
    for customer, month, cents, status in map(parsed, (record for _, record in latest.values())):
        if status.strip().lower() == "paid":
            months = totals.setdefault(regions.get(customer, "unknown"), {})
            months[month] = months.get(month, 0) + cents
    want = {region: {m: cents / 100 for m, cents in months.items()} for region, months in totals.items()}
    orders = "order_id,customer,date,amount,status,updated\n" + "\n".join(record for *_, record in lines) + "\n"
    return orders.encode(), ("\n".join(customers) + "\n").encode(), want


def parsed(line):
    """(customer, month, cents, status) of a line as `draw` writes it."""
    head, _, rest = line.partition('"')
    if rest:
        text, _, tail = rest.partition('"')
        _, customer, day, _ = head.split(",")
        _, status, _ = tail.split(",")
    else:
        _, customer, day, text, status, _ = line.split(",")
    digits = "".join(c for c in text if c.isdigit())
    month = f"{day[6:]}-{day[3:5]}" if "/" in day else day[:7]
    return customer, month, int(digits) * (-1 if "(" in text else 1), status


def verify():
    rng = grader.rng()
    for count in (1, 40, 300):
        orders, customers, want = draw(rng, count)
        files = {"o.csv": orders, "c.csv": customers}
        argv = [grader.PYTHON, "/app/report.py", "/data/o.csv", "/data/c.csv"]
        got = grader.parse(grader.output(argv, files=files))
        if not grader.same(got, want, 1e-9):
            raise grader.Failed(f"of {count} orders it reports {str(got)[:300]}, not {str(want)[:300]}")


grader.main(verify)
