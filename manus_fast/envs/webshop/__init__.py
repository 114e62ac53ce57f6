"""WebShop: store, pages, reward, and the environment over them."""
