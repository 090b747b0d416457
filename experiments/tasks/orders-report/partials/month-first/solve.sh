# Reads dates with the month first.
bash "$(dirname "$0")/oracle.sh"
sed -i 's#%d/%m/%Y#%m/%d/%Y#' /app/report.py
