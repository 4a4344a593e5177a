"""What people see: figures, tables, the notebook panel, the claims ledger and the site."""
