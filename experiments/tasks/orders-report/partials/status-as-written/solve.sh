# Takes the status as it is written.
bash "$(dirname "$0")/oracle.sh"
sed -i 's/row\["status"\].strip().lower()/row["status"]/' /app/report.py
