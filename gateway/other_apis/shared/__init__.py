"""What the APIs other than chat completions share: conversations, tools and answers between their forms and ours."""
