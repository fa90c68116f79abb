"""The Kubernetes manifests in deploy/kubernetes: rendered, checked against schemas and against each other."""
