{{/* Names and labels. 36 characters leave room for a role and for what a Deployment adds to its pods. */}}
{{- define "slipstream.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "slipstream.runName" -}}
{{- default .Release.Name .Values.runName -}}
{{- end }}

{{/* Labels that never change: (list root component). */}}
{{- define "slipstream.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* Image of a role: (list root flavour). */}}
{{- define "slipstream.image" -}}
{{- $root := index . 0 -}}
{{- printf "%s:%s-%s" $root.Values.image.repository (default $root.Chart.AppVersion $root.Values.image.tag) (index . 1) -}}
{{- end }}

{{- define "slipstream.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "slipstream.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "slipstream.redisSecret" -}}
{{- default (printf "%s-redis" (include "slipstream.fullname" .)) .Values.redis.existingSecret -}}
{{- end }}

{{- define "slipstream.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{- printf "redis://%s-redis:6379/0" (include "slipstream.fullname" .) -}}
{{- else -}}
{{- required "redis.url: with redis.enabled false, give the server's URL, such as redis://HOST:6379/0" .Values.redis.url -}}
{{- end -}}
{{- end }}

{{/* The config's text: configText, else the tree of config, else the README's run. */}}
{{- define "slipstream.config" -}}
{{- if and .Values.config .Values.configText -}}
{{- fail "config and configText: give one of them" -}}
{{- end -}}
{{- if .Values.configText -}}
{{- .Values.configText -}}
{{- else if .Values.config -}}
{{- toYaml .Values.config -}}
{{- else -}}
{{- .Files.Get "files/config.yaml" -}}
{{- end -}}
{{- end }}

{{/* Port of an external server: what stands behind the last colon of its host. */}}
{{- define "slipstream.redisPort" -}}
{{- $host := (urlParse .Values.redis.url).host -}}
{{- if contains ":" $host -}}{{- splitList ":" $host | last -}}{{- else -}}6379{{- end -}}
{{- end }}
