"""A site's own policy on what leaves it, whatever app it is sent: `fedveil site supernode`. See docs/deploy.md."""
