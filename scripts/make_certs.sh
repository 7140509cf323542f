#!/usr/bin/env bash
# Makes certificates for mutual TLS: scripts/make_certs.sh DIR HOST_OF_THE_SYNCER... (names or addresses).
# --tls takes DIR/syncer on the syncer's machine and DIR/learner on the learners'; DIR/authority stays at home.
set -euo pipefail
umask 077

if [ $# -lt 2 ]; then
  echo "error: name a folder for the certificates, then every name or address of the syncer" >&2
  exit 2
fi
folder=$1
shift
if [ -e "$folder/authority" ]; then
  echo "error: $folder/authority is there already" >&2
  exit 2
fi

names=()
for host in "$@"; do
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then names+=("IP:$host"); else names+=("DNS:$host"); fi
done
subject_names=$(IFS=,; echo "${names[*]}")

mkdir -p "$folder/authority" "$folder/syncer" "$folder/learner"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=ddiloco authority" \
  -keyout "$folder/authority/key.pem" -out "$folder/authority/cert.pem" 2>/dev/null

make() {
  local role=$1 extensions=$2
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=ddiloco $role" \
    -keyout "$folder/$role/key.pem" -out "$folder/$role/request.pem" 2>/dev/null
  openssl x509 -req -in "$folder/$role/request.pem" -days 825 -CAcreateserial \
    -CA "$folder/authority/cert.pem" -CAkey "$folder/authority/key.pem" \
    -extfile <(echo "$extensions") -out "$folder/$role/cert.pem" 2>/dev/null
  cp "$folder/authority/cert.pem" "$folder/$role/ca.pem"
  rm "$folder/$role/request.pem"
}

make syncer $'extendedKeyUsage=serverAuth\nsubjectAltName='"$subject_names"
make learner $'extendedKeyUsage=clientAuth,serverAuth\nsubjectAltName=DNS:ddiloco-learner'  # they serve each other
echo "$folder/syncer $folder/learner"
