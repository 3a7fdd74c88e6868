"""The programs of the deployment test run in processes of their own: pytest does not import them."""

collect_ignore = ["programs"]
