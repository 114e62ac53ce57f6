"""WebShop: its reward and a generated catalogue."""
