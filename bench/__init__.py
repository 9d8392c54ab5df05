"""`kvrelay bench`: load for any server that speaks OpenAI's API, and what its answers took. It knows no other room."""
