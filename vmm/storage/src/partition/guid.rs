//! GUIDs as GPT stores them, and those of partition types.

/// Partition types with a name: those of the Discoverable Partitions Specification for x86-64, and a few others.
const TYPES: [(&str, &str); 15] = [
    ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "EFI system"),
    ("21686148-6449-6e6f-744e-656564454649", "BIOS boot"),
    ("bc13c2ff-59e6-4262-a352-b275fd6f7172", "Linux boot"),
    ("0fc63daf-8483-4772-8e79-3d69d8477de4", "Linux"),
    ("4f68bce3-e8cd-4db1-96e7-fbcaf984b709", "Linux root"),
    ("8484680c-9521-48c6-9c11-b0720656f69e", "Linux /usr"),
    ("933ac7e1-2eb4-4f13-b844-0e14e2aef915", "Linux /home"),
    ("4d21b016-b534-45c2-a9fb-5c16e091fd2d", "Linux /var"),
    ("3b8f8425-20e0-4f3b-907f-1a25a76f98e8", "Linux /srv"),
    ("0657fd6d-a4ab-43c4-84e5-0933c84b4f4f", "Linux swap"),
    ("e6d6d379-f507-44c2-a23c-238f2a3df928", "Linux LVM"),
    ("a19d880f-05fc-4d3b-a006-743f0f84911e", "Linux RAID"),
    (
        "2c7357ed-ebd2-46d9-aec1-23d437ec2bf5",
        "verity of Linux root",
    ),
    ("ca7d7ccb-63ed-4c53-861c-1742536059cc", "LUKS"),
    ("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7", "Microsoft data"),
];

/// Formats a GUID: its first three numbers are little-endian.
pub(super) fn text(guid: &[u8; 16]) -> String {
    let [a, b, c, d, e, f, g, h, rest @ ..] = *guid;
    let [i, j, node @ ..] = rest;
    let node: String = node.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{d:02x}{c:02x}{b:02x}{a:02x}-{f:02x}{e:02x}-{h:02x}{g:02x}-{i:02x}{j:02x}-{node}")
}

/// Returns the name of the partition type `guid`, or the GUID itself.
pub(super) fn type_name(guid: &[u8; 16]) -> String {
    let text = text(guid);
    let known = TYPES.iter().find(|(known, _)| *known == text);
    known.map_or(text, |(_, name)| (*name).to_owned())
}
