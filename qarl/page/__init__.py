"""`qarl report`: runs as one page that needs nothing but a browser."""
