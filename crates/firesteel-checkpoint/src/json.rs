//! JSON that may be hostile: bounded files, no duplicate keys, bounded names.

use crate::CheckpointError;
use crate::mistaken::mistaken_file;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};
use std::borrow::Cow;
use std::fmt;
use std::io::Read;
use std::path::Path;

/// Longest index file, in bytes.
pub(crate) const MAX_INDEX_BYTES: u64 = 16 << 20;
/// Longest name of a tensor, a shard or a metadata entry, in bytes of JSON text.
const MAX_NAME_BYTES: usize = 1024;

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    require_regular(path)?;
    let file = fs_err::File::open(path)?;
    let length = file.metadata()?.len();
    if length > limit {
        let reason = format!("{length} bytes long; accepted: at most {limit}");
        return Err(CheckpointError::Json { file: path.into(), reason });
    }
    let mut bytes = Vec::new();
    bytes.reserve_exact(usize::try_from(length).unwrap_or_default());
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Refuses folders, pipes, devices and sockets without opening them.
pub(crate) fn require_regular(path: &Path) -> Result<(), CheckpointError> {
    if fs_err::metadata(path)?.is_file() {
        return Ok(());
    }
    let reason = "not a regular file; only regular files are read".to_owned();
    Err(CheckpointError::Path { path: path.into(), reason })
}

/// Parses an object of a file, refusing duplicate keys at every level.
pub(crate) fn parse_object(
    file: &Path,
    text: &[u8],
) -> Result<Map<String, Value>, CheckpointError> {
    let error = |reason: String| CheckpointError::Json { file: file.into(), reason };
    // Editors on some systems put a byte order mark first; Python's readers skip it.
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    if let Some(mistake) = mistaken_file(text) {
        return Err(error(mistake.into()));
    }
    match serde_json::from_slice::<Strict>(text) {
        Ok(Strict(Value::Object(map))) => Ok(map),
        Ok(_) => Err(error("the file must hold one JSON object".into())),
        Err(e) => Err(error(format!("not valid JSON: {e}"))),
    }
}

/// A value whose objects have each key once.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number is not finite"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = access.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let Strict(value) = access.next_value()?;
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!("key {key:?} appears twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// A string of bounded length, borrowed from the text where it has no escapes. The raw text is
/// looked at before anything is copied, so a hostile string costs no memory.
struct Name<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let Some(inner) = raw.strip_prefix('"').and_then(|r| r.strip_suffix('"')) else {
            return Err(D::Error::custom("a value that must be a string is none"));
        };
        if inner.len() > MAX_NAME_BYTES {
            let length = inner.len();
            return Err(D::Error::custom(format_args!(
                "a name of {length} bytes, {:?}, is longer than the {MAX_NAME_BYTES} accepted",
                shorten(inner)
            )));
        }
        if inner.contains('\\') {
            return serde_json::from_str(raw).map(|s| Name(Cow::Owned(s))).map_err(Error::custom);
        }
        Ok(Name(Cow::Borrowed(inner)))
    }
}

/// The members of an object in order: bounded names and unread values. Refuses a member twice and
/// more than `limit` members.
pub(crate) fn members(text: &str, limit: usize) -> Result<Vec<(Cow<'_, str>, &RawValue)>, String> {
    struct MembersVisitor {
        limit: usize,
    }

    impl<'de> Visitor<'de> for MembersVisitor {
        type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(Name(name)) = access.next_key()? {
                if members.len() == self.limit {
                    let limit = self.limit;
                    return Err(A::Error::custom(format_args!("more than {limit} entries")));
                }
                members.push((name, access.next_value()?));
            }
            Ok(members)
        }
    }

    // Any other value would be quoted whole in the parser's message.
    if !text.trim_start_matches([' ', '\t', '\n', '\r']).starts_with('{') {
        return Err("it must be a JSON object".into());
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let members = deserializer
        .deserialize_map(MembersVisitor { limit })
        .and_then(|members| deserializer.end().map(|()| members))
        .map_err(|e| e.to_string())?;
    let mut names: Vec<&str> = members.iter().map(|(name, _)| name.as_ref()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("key {:?} appears twice", twice[0]));
    }
    Ok(members)
}

/// A member's value that must be a string of bounded length.
pub(crate) fn name(raw: &RawValue) -> Result<Cow<'_, str>, String> {
    Name::deserialize(raw).map(|Name(name)| name).map_err(|e: serde_json::Error| e.to_string())
}

/// The first part of a text that may be very long, for a message.
pub(crate) fn shorten(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(80) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}
