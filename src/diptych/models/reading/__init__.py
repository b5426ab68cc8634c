"""What configs say in words of their own, one matter or one family a file: `models.read` asks them."""
