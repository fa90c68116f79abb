"""The OpenAPI 3.1 document of the gateway, served at GET /openapi.json.

document.py makes it of the application's table of routes; a route that operations.py does not describe is an error.
The schemas of requests and answers are derived from the types in openai_schemas.py and its like, which are of no other
use: the handlers check what they read themselves. Read operations.py first. Uses batches, costs, dashboard, operator,
routing, settings, surfaces, telemetry and tenants.
"""
