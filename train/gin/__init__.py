"""gin configuration: files and flags are read and checked before gin runs them."""
