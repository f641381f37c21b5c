use super::*;
use crate::Gva;
use crate::condition::{Comparison, Condition};
use crate::insn::testing::bytes;
use crate::regs::{Gpr, RegisterSet};
use expect_test::{Expect, expect};
use iced_x86::{Decoder, DecoderOptions};

mod reads;

const AT: Gva = Gva(0xffff_ffff_8123_4560);
const DETOUR: Gva = Gva(0xffff_ffff_8004_0000);
const RING: Ring = Ring {
    head: Gva(0xffff_ffff_8010_0000),
    limit: Gva(0xffff_ffff_8010_0040),
    bell: Gva(0xffff_ffff_8010_0048),
    cells: Gva(0xffff_ffff_8010_1000),
    capacity: 1024,
    watermark: 512,
    doorbell_port: 0x5e,
};
const LOST: Gva = Gva(0xffff_ffff_8010_0080);
const VETOED: Gva = Gva(0xffff_ffff_8010_0088);
const INSTANCES: Instances = Instances {
    at: Gva(0xffff_ffff_8020_0000),
    count: 3,
    free: Gva(0xffff_ffff_8010_00c0),
};

fn span(hex: &str) -> Span {
    Span::find(&bytes(hex), AT, AT).unwrap()
}

fn text(code: &[u8], at: Gva) -> String {
    let mut lines = String::new();
    for instruction in Decoder::with_ip(64, code, at.0, DecoderOptions::NONE).iter() {
        let line = format!("{:x} {instruction}\n", instruction.ip() & 0xffff_ffff);
        lines.push_str(&line);
    }
    lines
}

fn record(capture: &Capture) -> Part<'_> {
    Part::Record {
        source: 9,
        capture,
        lost: LOST,
        waits: false,
    }
}

fn few() -> Capture {
    Capture {
        registers: RegisterSet::from_iter([Gpr::Rdi, Gpr::Rcx]),
        stack: vec![1],
        task: None,
        cpu: Some(0x1_0000),
        fetching: None,
        stack_copy: None,
    }
}

#[test]
fn a_detour_of_the_kernel_is_addressed_with_32_bits() {
    let condition = Condition {
        register: Gpr::Rdx,
        comparison: Comparison::Greater,
        value: 0x1_0000_0000,
    };
    let capture = few();
    let member = Member {
        conditions: &[condition],
        vetoed: VETOED,
        part: record(&capture),
    };
    let span = span("55 488b3d10000000 c3");
    let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
    let detour = recorder.place(DETOUR).unwrap();
    assert_eq!(detour.code().len(), recorder.size());
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 lea eax,[rsp+28h]
        8004000a and eax,0FFFh
        8004000f cmp eax,0FF0h
        80040014 ja 0FFFFFFFF800400DFh
        8004001a mov rdx,[rsp+10h]
        8004001f mov rax,100000000h
        80040029 cmp rdx,rax
        8004002c jbe 0FFFFFFFF800400EDh
        80040032 mov ecx,gs:[10000h]
        8004003a rdtsc
        8004003c shl rdx,20h
        80040040 lea r11,[rax+rdx]
        80040044 cmp ecx,gs:[10000h]
        8004004c jne short 0FFFFFFFF80040032h
        8004004e mov [rsp+4],ecx
        80040052 mov rax,[0FFFFFFFF80100000h]
        8004005a lea rcx,[rax+1]
        8004005e cmp rcx,[0FFFFFFFF80100040h]
        80040066 ja 0FFFFFFFF800400F8h
        8004006c lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040076 jne short 0FFFFFFFF8004005Ah
        80040078 and eax,3FFh
        8004007d shl eax,6
        80040080 mov [rax-7FEFEFF8h],r11
        80040087 lea r11,[rax-7FEFF000h]
        8004008e mov rax,[rsp]
        80040092 mov [r11+10h],rax
        80040096 mov rax,[rsp+18h]
        8004009b mov [r11+18h],rax
        8004009f mov [r11+20h],rdi
        800400a3 mov rax,[rsp+30h]
        800400a8 mov [r11+28h],rax
        800400ac mov [r11],ecx
        800400af mov dword ptr [r11+4],1000009h
        800400b7 sub rcx,[0FFFFFFFF80100048h]
        800400bf cmp rcx,1
        800400c3 jb short 0FFFFFFFF80040103h
        800400c5 pop rax
        800400c6 xchg al,ah
        800400c8 and al,8
        800400ca add al,78h
        800400cc sahf
        800400cd pop r11
        800400cf pop rdx
        800400d0 pop rcx
        800400d1 pop rax
        800400d2 push rbp
        800400d3 mov rdi,[0FFFFFFFF81234578h]
        800400da jmp 0FFFFFFFF81234568h
        800400df pop rax
        800400e0 xchg al,ah
        800400e2 and al,8
        800400e4 add al,78h
        800400e6 sahf
        800400e7 pop r11
        800400e9 pop rdx
        800400ea pop rcx
        800400eb pop rax
        800400ec int3
        800400ed lock inc qword ptr [0FFFFFFFF80100088h]
        800400f6 jmp short 0FFFFFFFF800400C5h
        800400f8 lock inc qword ptr [0FFFFFFFF80100080h]
        80040101 jmp short 0FFFFFFFF800400C5h
        80040103 out 5Eh,al
        80040105 jmp short 0FFFFFFFF800400C5h
    "#]]
    .assert_eq(&text(detour.code(), DETOUR));
    let escape = detour.escape().unwrap();
    let offset = usize::try_from(escape.0 - DETOUR.0).unwrap();
    assert_eq!(detour.code()[offset], 0xcc);
    // Offsets in the pushes, after them, in the pops, before the copies and in them, at the escape and its int3,
    // and in cold code.
    let depths = [
        (0, Some(0)),
        (1, Some(8)),
        (6, Some(40)),
        (0x8f, Some(40)),
        (0xc5, Some(40)),
        (0xcd, Some(32)),
        (0xd1, Some(8)),
        (0xd2, None),
        (0xda, None),
        (0xdf, Some(40)),
        (0xeb, Some(8)),
        (0xec, Some(0)),
        (0xed, Some(40)),
        (0x105, Some(40)),
        (0x107, None),
    ];
    for (offset, depth) in depths {
        let found = detour.interrupted(DETOUR.wrapping_add(offset));
        assert_eq!(found, depth.map(|depth| (AT, depth)), "{offset:#x}");
    }
    assert_eq!(detour.resume(AT), Some(detour.tail()));
    assert_eq!(
        detour.resume(AT.wrapping_add(1)),
        detour.tail().checked_add(1)
    );
    assert_eq!(detour.resume(AT.wrapping_add(2)), None);
}

#[test]
fn a_hit_that_waits_asks_for_room_before_it_is_lost() {
    let capture = Capture::default();
    let waits = Part::Record {
        source: 9,
        capture: &capture,
        lost: LOST,
        waits: true,
    };
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: waits,
    };
    let recorder = Recorder::new(&span("0f1f440000 c3"), &RING, &[member]).unwrap();
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 rdtsc
        80040008 shl rdx,20h
        8004000c lea r11,[rax+rdx]
        80040010 mov rax,[0FFFFFFFF80100000h]
        80040018 lea rcx,[rax+3]
        8004001c cmp rcx,[0FFFFFFFF80100040h]
        80040024 ja 0FFFFFFFF800400F4h
        8004002a lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040034 jne short 0FFFFFFFF80040018h
        80040036 and eax,3FFh
        8004003b shl eax,6
        8004003e mov [rax-7FEFEFF8h],r11
        80040045 lea r11,[rax-7FEFF000h]
        8004004c mov rax,[rsp]
        80040050 mov [r11+10h],rax
        80040054 mov rax,[rsp+20h]
        80040059 mov [r11+18h],rax
        8004005d mov rax,[rsp+18h]
        80040062 mov [r11+20h],rax
        80040066 mov rax,[rsp+10h]
        8004006b mov [r11+28h],rax
        8004006f mov [r11+30h],rbx
        80040073 lea rax,[rsp+28h]
        80040078 mov [r11+38h],rax
        8004007c mov [r11+48h],rbp
        80040080 mov [r11+50h],rsi
        80040084 mov [r11+58h],rdi
        80040088 mov [r11+60h],r8
        8004008c mov [r11+68h],r9
        80040090 mov [r11+70h],r10
        80040094 mov rax,[rsp+8]
        80040099 mov [r11+78h],rax
        8004009d mov [r11+88h],r12
        800400a4 mov [r11+90h],r13
        800400ab mov [r11+98h],r14
        800400b2 mov [r11+0A0h],r15
        800400b9 mov [r11],ecx
        800400bc mov dword ptr [r11+4],3000009h
        800400c4 sub rcx,[0FFFFFFFF80100048h]
        800400cc cmp rcx,3
        800400d0 jb short 0FFFFFFFF80040100h
        800400d2 pop rax
        800400d3 xchg al,ah
        800400d5 and al,8
        800400d7 add al,78h
        800400d9 sahf
        800400da pop r11
        800400dc pop rdx
        800400dd pop rcx
        800400de pop rax
        800400df nop [rax+rax]
        800400e4 jmp 0FFFFFFFF81234565h
        800400e9 lock inc qword ptr [0FFFFFFFF80100080h]
        800400f2 jmp short 0FFFFFFFF800400D2h
        800400f4 out 93h,al
        800400f6 test al,al
        800400f8 jne 0FFFFFFFF80040010h
        800400fe jmp short 0FFFFFFFF800400E9h
        80040100 out 5Eh,al
        80040102 jmp short 0FFFFFFFF800400D2h
    "#]]
    .assert_eq(&text(recorder.place(DETOUR).unwrap().code(), DETOUR));
}

#[test]
fn return_code_of_the_kernel_finds_its_instance_by_the_stub() {
    let capture = Capture {
        registers: RegisterSet::from_iter([Gpr::Rax]),
        ..Capture::default()
    };
    let entry = EntryCapture {
        registers: RegisterSet::from_iter([Gpr::Rdi]),
        stack: Vec::new(),
        current: None,
        cpu: None,
    };
    let exit = Exit {
        source: 9,
        capture: &capture,
        instances: &INSTANCES,
        entry: &entry,
        lost: LOST,
        waits: false,
        first_stub: 5,
    };
    let code = ReturnCode::new(&RING, &exit).unwrap();
    let text = text(code.code(), DETOUR);
    let text: Vec<&str> = text
        .lines()
        .filter(|line| !line.ends_with(" int3"))
        .collect();
    expect![[r#"
        80040000 call 0FFFFFFFF80040030h
        80040010 call 0FFFFFFFF80040030h
        80040020 call 0FFFFFFFF80040030h
        80040030 push rax
        80040031 push rcx
        80040032 push rdx
        80040033 push rsi
        80040034 push rdi
        80040035 pushfq
        80040036 mov rsi,[rsp+30h]
        8004003b lea rdx,[0FFFFFFFF80040005h]
        80040042 sub rsi,rdx
        80040045 shl rsi,2
        80040049 lea rsi,[rsi-7FE00000h]
        80040050 mov rax,[rsi+10h]
        80040054 mov [rsp+30h],rax
        80040059 mov qword ptr [rsi+18h],0
        80040061 rdtsc
        80040063 shl rdx,20h
        80040067 lea rdi,[rax+rdx]
        8004006b mov rax,[0FFFFFFFF80100000h]
        80040073 lea rcx,[rax+2]
        80040077 cmp rcx,[0FFFFFFFF80100040h]
        8004007f ja 0FFFFFFFF80040159h
        80040085 lock cmpxchg [0FFFFFFFF80100000h],rcx
        8004008f jne short 0FFFFFFFF80040073h
        80040091 and eax,3FFh
        80040096 shl eax,6
        80040099 mov [rax-7FEFEFF8h],rdi
        800400a0 lea rdi,[rax-7FEFF000h]
        800400a7 mov rax,[rsp]
        800400ab mov [rdi+10h],rax
        800400af mov rax,[rsp+28h]
        800400b4 mov [rdi+18h],rax
        800400b8 mov eax,esi
        800400ba sub eax,80200000h
        800400bf shl rax,22h
        800400c3 mov rdx,8000050000000000h
        800400cd add rax,rdx
        800400d0 mov rdx,[rsi+8]
        800400d4 shl rdx,18h
        800400d8 shr rdx,18h
        800400dc add rax,rdx
        800400df mov [rdi+20h],rax
        800400e3 mov rax,[rsi]
        800400e6 mov [rdi+28h],rax
        800400ea mov rax,[rsi+28h]
        800400ee mov [rdi+30h],rax
        800400f2 mov rax,[rsi+30h]
        800400f6 mov [rdi+38h],rax
        800400fa mov rax,[rsi+38h]
        800400fe mov [rdi+48h],rax
        80040102 mov [rdi],ecx
        80040104 mov dword ptr [rdi+4],2000009h
        8004010b sub rcx,[0FFFFFFFF80100048h]
        80040113 cmp rcx,2
        80040117 jb short 0FFFFFFFF80040164h
        80040119 mov eax,esi
        8004011b sub eax,80200000h
        80040120 mov ecx,eax
        80040122 shr ecx,6
        80040125 mov rax,[0FFFFFFFF801000C0h]
        8004012d mov [rsi],eax
        8004012f mov rdx,rax
        80040132 shr rdx,20h
        80040136 inc edx
        80040138 shl rdx,20h
        8004013c or rdx,rcx
        8004013f lock cmpxchg [0FFFFFFFF801000C0h],rdx
        80040149 jne short 0FFFFFFFF8004012Dh
        8004014b pop rax
        8004014c xchg al,ah
        8004014e and al,8
        80040150 add al,78h
        80040152 sahf
        80040153 pop rdi
        80040154 pop rsi
        80040155 pop rdx
        80040156 pop rcx
        80040157 pop rax
        80040158 ret
        80040159 lock inc qword ptr [0FFFFFFFF80100080h]
        80040162 jmp short 0FFFFFFFF80040119h
        80040164 out 5Eh,al
        80040166 jmp short 0FFFFFFFF80040119h"#]]
    .assert_eq(&text.join("\n"));
}

#[test]
fn only_the_copies_depend_on_where_a_detour_is() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let recorder = Recorder::new(&span("488b3d10000000 c3"), &RING, &[member]).unwrap();
    let one = recorder.place(DETOUR).unwrap();
    let other = recorder.place(DETOUR.wrapping_add(0x123_4567)).unwrap();
    let tail = usize::try_from(one.tail().0 - DETOUR.0).unwrap();
    let differ: Vec<usize> = (0..recorder.size())
        .filter(|index| one.code()[*index] != other.code()[*index])
        .collect();
    assert!(
        differ.iter().all(|index| (tail..tail + 12).contains(index)),
        "{differ:?}"
    );
    assert!(!differ.is_empty());
}

fn refused(ring: &Ring, member: Member<'_>, expected: Expect) {
    let error = Recorder::new(&span("0f1f440000 c3"), ring, &[member]).unwrap_err();
    expected.assert_eq(&error.to_string());
}

#[test]
fn what_generated_code_cannot_do_is_refused() {
    let capture = few();
    let member = Member {
        conditions: &[],
        vetoed: VETOED,
        part: record(&capture),
    };
    let ring = |capacity, watermark| Ring {
        capacity,
        watermark,
        ..RING
    };
    for (capacity, watermark) in [(0, 0), (16, 8), (33, 8), (1 << 25, 8), (64, 0), (64, 64)] {
        let error = Recorder::new(
            &span("0f1f440000 c3"),
            &ring(capacity, watermark),
            &[member],
        );
        assert!(
            matches!(error, Err(BuildError::Ring { .. })),
            "{capacity} {watermark}"
        );
    }
    let far = Ring {
        limit: Gva(0x8000_0000),
        ..RING
    };
    refused(
        &far,
        member,
        expect![
            "the ring's limit at 0x80000000 is not within the upper or lower 2 GiB, where detours reach it"
        ],
    );
    let high = Capture {
        stack: vec![512],
        ..few()
    };
    let word = Member {
        part: record(&high),
        ..member
    };
    refused(
        &RING,
        word,
        expect!["word 512 above the stack pointer lies a page or more away from it"],
    );
    let many = Capture {
        stack: vec![0; 32],
        ..few()
    };
    let words = Member {
        part: record(&many),
        ..member
    };
    refused(
        &RING,
        words,
        expect!["32 words of the stack; at most 31 are possible"],
    );
}

#[test]
fn instances_begin_on_the_free_list() {
    let entry = EntryCapture {
        registers: RegisterSet::default(),
        stack: vec![0, 1],
        current: None,
        cpu: None,
    };
    let layout = InstanceLayout::new(&entry).unwrap();
    assert_eq!(layout.stride(), 256);
    let (bytes, free) = layout.initial(3, 0);
    assert_eq!((bytes.len(), free), (768, 0));
    let next: Vec<u8> = [0, 256, 512].map(|at| bytes[at]).to_vec();
    assert_eq!(next, [1, 2, 0xff]);
    let instance = layout.read(&bytes[256..]).unwrap();
    assert_eq!((instance.slot, instance.generation), (Gva(0), 0));
    assert_eq!(layout.initial(0, 0), (Vec::new(), 0xffff_ffff));
    assert!(layout.read(&bytes[600..]).is_err());
}

#[test]
fn impossible_numbers_of_instances_are_refused() {
    for (count, first_stub) in [(0, 0), (65537, 0), (1, 1 << 23), (2, (1 << 23) - 1)] {
        let instances = Instances { count, ..INSTANCES };
        let entry = EntryCapture {
            registers: RegisterSet::default(),
            stack: Vec::new(),
            current: None,
            cpu: None,
        };
        let exit = Exit {
            source: 0,
            capture: &Capture::default(),
            instances: &instances,
            entry: &entry,
            lost: LOST,
            waits: false,
            first_stub,
        };
        let result = ReturnCode::new(&RING, &exit);
        assert!(
            matches!(result, Err(BuildError::Instances { .. })),
            "{count} {first_stub}"
        );
    }
}
