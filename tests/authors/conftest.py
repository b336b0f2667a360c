collect_ignore = ["api_1"]  # plugins of before; test_api_2.py moves and runs them
