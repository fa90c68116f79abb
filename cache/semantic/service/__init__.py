"""The process of the semantic cache: one for all gateways of a host, so that neither its work nor its end is theirs."""
