"""What one client does: pure tasks, and the engines that run them to the same result."""
