"""The endpoints: one file for each family, with the fields that it reads and the answers that it writes."""
