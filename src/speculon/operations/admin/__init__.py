"""What an administrator does with a server: look at it, and change its models. See docs/admin.md."""
