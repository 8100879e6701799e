{{- define "slipstream.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}
