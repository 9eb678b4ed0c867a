#!/bin/sh
# make-secrets.sh [FOLDER]: the tokens and keys that compose.yaml mounts; what is there already stays as it is.
# The folder is for its owner alone; the files are readable, since each container reads them as a user of its own.
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"

random() { od -An -N "$1" -tx1 /dev/urandom | tr -d ' \n'; }

[ -s client_token ] || random 24 >client_token
[ -s metrics_token ] || random 24 >metrics_token
[ -s grafana_password ] || random 12 >grafana_password
[ -s handle_key ] || head -c 32 /dev/urandom >handle_key
if [ ! -s tokens ]; then
  printf '# token  tenant  roles\n%s clients step,pull\n%s operators admin\n' \
    "$(cat client_token)" "$(cat metrics_token)" >tokens
fi
chmod 444 client_token metrics_token grafana_password handle_key tokens
echo "secrets are in $folder"
