collect_ignore = ["api_1"]  # plugins written for API 1; test_api_2.py migrates and runs them
