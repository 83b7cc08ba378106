"""The tests, one folder for each folder of the package."""
